/* A peer: another rank of the world, what waits for its messages, and what is known of it. All groups share it. */
#pragma once

#include "endpoint.h"
#include "meeting.h"

struct engine;
struct transfer;

/* A clear to send: the operation that its sender has begun to receive in. */
struct peer_cts {
  uint16_t group, index; /* `index` is WIRE_MESSAGE, or 0 for a collective */
  uint32_t place;
};

#define PEER_EARLY_CTS 16

struct peer {
  struct endpoint endpoint; /* first: the transport's callbacks come with it */
  struct engine* engine;

  struct transfer *posted, *posted_last;          /* transfers from it that have been issued, in that order */
  struct recv_desc *unexpected, *unexpected_last; /* messages that have arrived for others */
  bool has_cts;                                   /* acknowledgements say */
  struct peer_cts cts;                            /* this, */
  bool cts_pending;                               /* which none has said */

  /* What the peer is ready to receive of operations that have not been issued here. Where there are more the oldest is
   * forgotten: the peer says it again (timers.h). */
  struct peer_cts early_cts[PEER_EARLY_CTS];
  uint32_t early_count;

  struct meeting meeting;
  char status[160]; /* what the side channel has heard of it last */

  /* Messages and acknowledgements that have arrived from it, and operations that did not end without it. */
  uint64_t signs_of_life;

  bool failed; /* it has sent an abort: */
  uint16_t failed_group;
  bool failed_in_message; /* a collective otherwise */
  uint32_t failed_from;   /* operations of that group from this place on */
};

static inline struct peer* peer_of(struct endpoint* endpoint) { return (struct peer*)endpoint; }
