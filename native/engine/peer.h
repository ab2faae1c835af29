/* A peer: another rank of the world, what waits for its messages, and what is known of it. All groups share it. */
#pragma once

#include "endpoint.h"
#include "meeting.h"

struct engine;
struct transfer;

struct peer {
  struct endpoint endpoint; /* first: the transport's callbacks come with it */
  struct engine* engine;

  struct transfer *posted, *posted_last;          /* transfers from it that have been issued, in that order */
  struct recv_desc *unexpected, *unexpected_last; /* messages that have arrived for others */
  uint16_t cts_group;                             /* the next acknowledgement says `cts` of this group, */
  uint32_t cts;
  bool cts_pending; /* which the peer has not heard */

  struct meeting meeting;
  char status[160]; /* what the side channel has heard of it last */

  bool failed; /* it has sent an abort: */
  uint16_t failed_group;
  uint32_t failed_after; /* transfers of that group after this one are of the operation that failed */
};

static inline struct peer* peer_of(struct endpoint* endpoint) { return (struct peer*)endpoint; }
