/*
 * The probe of devices with a peer: how long messages may be, and how they arrive. The functions are in mlxdist.h.
 *
 * It has a transport of its own, before there is that of a group: an endpoint for each peer, with the queue pairs that
 * a group's would have, two a link, since a device may have three in all. In each round they are re-created, because a
 * message that does not fit its receive may break them. What fails is what the probe is for: it is a finding.
 */
#pragma once

#include "mlxdist.h"
#include "transport.h"

/* What has become of the messages of a channel in this round. */
struct probe_trial {
  uint32_t completed;                      /* receives, */
  uint32_t whole;                          /* those with all of a message, */
  uint32_t parts;                          /* and what they have of a message of two frames, as a mask */
  bool empty;                              /* a message without content took a receive, */
  bool lengths;                            /* and byte_len was right so far */
  char failed[MLXDIST_PEER_PROBE_FAILURE]; /* "" while nothing has */
};

struct mlxdist_peer_probe {
  mlxdist_options options;
  uint64_t bulk_bytes; /* of the slots of a channel, whatever their size */
  struct transport_counters counters;
  struct transport transport;
  struct endpoint* endpoints; /* by rank */
  struct endpoint** by_rank;
  struct probe_trial (*trials)[WIRE_CHANNELS]; /* by rank */
  uint32_t round;
};
