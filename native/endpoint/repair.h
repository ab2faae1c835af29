/*
 * Repairs: a queue pair that has failed is made anew, and what the peer has not confirmed is sent again.
 *
 * A completion with an error leaves the queue pair in the state ERR: nothing leaves it or arrives any more, and its
 * peer's half does not know. Both halves are destroyed and made anew, with a number (epoch) that is one higher, and
 * connected as they were at first, through the side channel:
 *
 *   REPAIR     address of the sender's new queue pair
 *   REPAIRED   its receives are posted: the receiver of this may send, from the first message that is missing there
 *
 * Either side may begin, or both at once: the higher epoch counts. Sequence numbers, messages that were not confirmed
 * and those that nobody has taken yet stay, so operations go on where they were. Completions of the old queue pair carry
 * the old epoch, and are passed over.
 *
 * Rejected: to move the old queue pair through RESET. Apple's provider does not allow ERR, and other drivers leave
 * completions of before the reset in the queue.
 */
#ifndef MLXDIST_ENDPOINT_REPAIR_H
#define MLXDIST_ENDPOINT_REPAIR_H

#include "peer.h"

/* So many queue pairs of a channel may fail, one after the other, before one of them has carried anything. */
#define REPAIR_MOST 8u

/* With the lock: a work request on this channel has completed with an error. */
int repair_begin(struct channel *channel, enum ibv_wc_status status);

/* Without the lock, which the side channel must not wait for: tells the peers of queue pairs that were made anew. */
void repair_tell(struct engine *engine);

/* Without the lock: a message of the side channel. False if it is none of a repair. */
bool repair_take(struct engine *engine, struct peer *peer, const void *bytes, uint64_t length, int *status);

#endif
