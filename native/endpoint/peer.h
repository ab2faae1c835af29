/* A peer: the channels to one other rank, and who waits for what arrives on them. All groups share the channels. */
#ifndef MLXDIST_ENDPOINT_PEER_H
#define MLXDIST_ENDPOINT_PEER_H

#include "channel.h"
#include "meeting.h"

#include <stdatomic.h>

#define PEER_SILENCE_BYTES 576

struct stream;

/* A cable to the peer: this rank's end of it. */
struct link {
  struct device* device;
  enum ibv_mtu mtu; /* of both ends */
  int32_t gid_index;
  union ibv_gid gid; /* the address of that index in the device's table: by it the peer reaches this rank */
  struct {
    char* memory;
    uint64_t bytes;
    struct ibv_mr* mr;
  } slab; /* all slots: one registration, since devices allow few */
};

struct peer {
  int32_t rank; /* in the world */
  struct channel channels[WIRE_CHANNELS];
  uint32_t channel_count; /* 0: not connected */
  struct link links[WIRE_LINKS];
  uint32_t link_count; /* 0: it cannot be reached */
  uint32_t psn[WIRE_CHANNELS];
  atomic_uint repairs_untold; /* channels with a new queue pair that the peer has to be told of, as a mask */
  bool connected;             /* its queue pairs are ready to send, and receives are posted */
  bool answered;      /* the peer has said that its own are, perhaps before its address came: two threads send these */
  atomic_bool usable; /* both: this rank may send */

  struct stream *expected, *expected_last; /* streams from it that have been issued, in that order */
  struct arrival *early, *early_last;      /* what has arrived for others */
  uint16_t ready_group;                    /* an acknowledgement with this group's `ready` is due, */
  uint32_t ready;
  bool tells_ready; /* if set */

  uint32_t dead_links;           /* cables that this rank does not send by any more, as a mask */
  uint32_t echo_links;           /* cables on which the peer wants an answer */
  const struct channel* suspect; /* its cable seems dead: it is, if the peer's answer on another says so; or NULL */

  struct meeting meeting;

  char news[160]; /* what the side channel has heard of it last */

  bool failed; /* it has sent an abort: */
  uint16_t failed_group;
  uint32_t failed_after; /* streams of that group after this one are of the operation that failed */
};

/* How a peer reaches this rank's queue pairs. */
struct peer_address {
  uint32_t links;
  uint16_t lids[WIRE_LINKS];
  uint8_t mtus[WIRE_LINKS]; /* enum ibv_mtu */
  union ibv_gid gids[WIRE_LINKS];
  uint32_t qp_num[WIRE_CHANNELS];
  uint32_t psn[WIRE_CHANNELS];
};

/* A first packet number that nothing of an earlier connection has. */
uint32_t peer_random_psn(void);

int peer_create(struct peer* peer, struct engine* engine);
/* First the queue pairs of all peers, then the memory of all: Apple's provider fails to unmap a region that a queue
 * pair uses. */
void peer_destroy_channels(struct peer* peer);
void peer_free_memory(struct peer* peer);
void peer_address(const struct peer* peer, struct peer_address* address);

int peer_connect(struct peer* peer, const struct peer_address* address);

/* The channel for small messages, on the first cable that works. */
static inline struct channel* peer_eager(struct peer* peer) {
  uint32_t link = 0;
  while (peer->dead_links >> link & 1) link++;
  return &peer->channels[2 * link + WIRE_EAGER];
}

/* The next acknowledgement says that this rank receives that stream. There is room for one group in it: what another
 * one has left there is sent first. */
int peer_tell_ready(struct peer* peer, uint16_t group, uint32_t stream);

/* Sends what the peer must know to go on, if it owes any and there is room. */
int peer_acknowledge(struct peer* peer, bool lazily);

/* "connecting to rank 1 by TCP fails: No route to host: WHAT TO DO" where that is why nothing gets through, else "". */
void peer_explain_silence(const struct peer* peer, char* text, size_t bytes);

/* Whether the peer has confirmed all that it was sent, and was told about all that has come from it. */
bool peer_is_settled(const struct peer* peer);

#endif
