/*
 * An endpoint: all channels to one other rank, over one or more links.
 *
 * Every message says how far all channels from its receiver have got, so an acknowledgement of its own is due only
 * where no message leaves in time. Nothing looks for that at every turn: the event that makes it due marks the
 * endpoint.
 */
#pragma once

#include "channel.h"
#include "link.h"

#include <stdatomic.h>

#define ENDPOINT_SILENCE_BYTES 576

struct endpoint {
  struct transport* transport;
  int32_t rank; /* in the world */
  struct channel channels[WIRE_CHANNELS];
  uint32_t channel_count; /* 0: not connected */
  struct link links[WIRE_MAX_LINKS];
  uint32_t link_count; /* 0: the rank cannot be reached */
  uint32_t psn[WIRE_CHANNELS];
  bool connected;     /* the queue pairs are ready to send, and receives are posted */
  bool answered;      /* the peer has said that its own are, perhaps before its address came: two threads send these */
  atomic_bool usable; /* both: this rank may send */

  struct wire_acks acks[WIRE_MAX_LINKS];      /* what the next message says of each link */
  struct wire_acks last_sent[WIRE_MAX_LINKS]; /* what the last one said */
  bool ack_pending;                           /* an acknowledgement is, or may soon be, due */
  bool ack_now;                               /* the peer seems not to know what it should */
  bool ack_requested;                         /* what the owner has to say leaves with an acknowledgement alone */
  uint32_t nak_pending;                       /* channels that lack a message, as a mask: the peer must hear of it */

  atomic_uint reconnects_pending; /* channels with a new queue pair that the peer has not heard of, as a mask */
  uint32_t dead_links;            /* links that this rank does not send by, as a mask */
  uint32_t peer_dead_links;       /* those of the peer, as it said last */
  uint32_t probe_links;           /* links on which the peer wants a reply */
  uint32_t suspects;  /* channels whose link is dead if a reply of the peer on another one says so, as a mask */
  uint32_t repeating; /* channels of links that the peer holds for dead: what they bring may have come by another
                         link, as a mask */
  bool acks_by_all;   /* acknowledgements leave by every link that works: the peer has lacked some */
  struct link_trial {
    bool pending; /* a reply is to come */
    uint32_t replies;
  } trials[WIRE_MAX_LINKS]; /* of dead links */
  uint64_t tried_ns;
};

/* How a peer reaches this rank's queue pairs. */
struct endpoint_address {
  uint32_t links;
  uint16_t lids[WIRE_MAX_LINKS];
  uint8_t mtus[WIRE_MAX_LINKS]; /* enum ibv_mtu */
  union ibv_gid gids[WIRE_MAX_LINKS];
  uint32_t qp_num[WIRE_CHANNELS];
  uint32_t psn[WIRE_CHANNELS];
};

/* Creates the queue pairs of all links, and their slabs; all or none. */
int endpoint_create(struct endpoint* endpoint);
/* First the queue pairs of all endpoints, then the memory of all: Apple's provider fails to unmap a region that a queue
 * pair uses. */
void endpoint_destroy_channels(struct endpoint* endpoint);
void endpoint_free_memory(struct endpoint* endpoint);

void endpoint_address(const struct endpoint* endpoint, struct endpoint_address* address);
int endpoint_connect(struct endpoint* endpoint, const struct endpoint_address* address);

/* The steps of it, for the probe of devices: whether the peer has as many links, whose MTUs both ends then use; and the
 * i-th queue pair, to RTS and without receives. */
int endpoint_check_address(struct endpoint* endpoint, const struct endpoint_address* address);
int endpoint_connect_channel(struct endpoint* endpoint, uint32_t i, const struct endpoint_address* address);

/* Sends what the peer must know to go on, if any of it is due and there is room. `lazily` leaves more of the window
 * open in the hope of a message that carries it. */
int endpoint_flush(struct endpoint* endpoint, bool lazily);

/* What happens because time has passed: retransmission, delayed acknowledgements, keepalives. */
int endpoint_tick(struct endpoint* endpoint, uint64_t now_ns);

/* "connecting to rank 1 by TCP fails: No route to host: WHAT TO DO" where that is why nothing gets through, else "". */
void endpoint_explain_silence(const struct endpoint* endpoint, char* text, size_t bytes);

/* Whether the peer has acknowledged all that it was sent, and has heard of all that has come from it. */
bool endpoint_is_settled(const struct endpoint* endpoint);

/* Whether this rank sends nothing by the link. */
static inline bool link_is_dead(const struct endpoint* endpoint, uint32_t link) {
  return endpoint->dead_links >> link & 1;
}

/* The channel for small messages, on the first link that works. */
static inline struct channel* endpoint_eager(struct endpoint* endpoint) {
  uint32_t link = 0;
  while (link_is_dead(endpoint, link)) link++;
  return &endpoint->channels[2 * link + WIRE_EAGER];
}
