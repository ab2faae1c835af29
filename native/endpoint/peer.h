/* A peer: the two channels to one other rank, and the streams to and from it. */
#ifndef MLXDIST_ENDPOINT_PEER_H
#define MLXDIST_ENDPOINT_PEER_H

#include "channel.h"

struct peer {
  int32_t rank;
  struct channel channels[WIRE_CHANNELS];
  char *memory; /* all slots of both channels: one registration a peer, since devices allow few */
  uint64_t memory_bytes;
  struct ibv_mr *mr;
  uint32_t psn[WIRE_CHANNELS];
  uint32_t streams_sent, streams_received; /* number of the last stream in each direction */
  uint32_t streams_done;                   /* of the last one to it in an operation that succeeded here */
  bool failed;                             /* it has sent an abort */
  uint32_t streams_done_there;             /* then: the last one from it in an operation that succeeded there */
  bool connected;
};

/* How a peer reaches this rank's two queue pairs. */
struct peer_address {
  uint32_t qp_num[WIRE_CHANNELS];
  uint32_t psn[WIRE_CHANNELS];
};

int peer_create(struct peer *peer, struct engine *engine, int32_t rank);
void peer_destroy(struct peer *peer, struct engine *engine);
void peer_address(const struct peer *peer, struct peer_address *address);
int peer_connect(struct peer *peer, struct engine *engine, const union ibv_gid *gid, uint16_t lid,
                 const struct peer_address *address);

/* The channel for a stream of so many bytes: both sides choose alike. */
static inline struct channel *peer_channel(struct peer *peer, uint64_t bytes) {
  uint64_t room = peer->channels[WIRE_EAGER].slot_bytes - CHANNEL_OVERHEAD;
  return &peer->channels[bytes <= room ? WIRE_EAGER : WIRE_BULK];
}

/* Sends what the peer must know to go on, if it owes any and there is room. */
int peer_acknowledge(struct peer *peer, bool lazily);

/* Whether the peer has confirmed all data. */
bool peer_has_everything(const struct peer *peer);

#endif
