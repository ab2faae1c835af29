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
 * and those that nobody has taken yet stay, so operations go on where they were. Completions of the old queue pair
 * carry the old epoch, and are passed over.
 *
 * Rejected: to move the old queue pair through RESET. Apple's provider does not allow ERR, and other drivers leave
 * completions of before the reset in the queue.
 */
#ifndef MLXDIST_ENDPOINT_REPAIR_H
#define MLXDIST_ENDPOINT_REPAIR_H

#include "peer.h"

/* So many queue pairs of a channel may fail, one after the other, before one of them has carried anything. */
#define REPAIR_MOST 8u

/* So many times a message was repeated when its queue pair seems to carry nothing any more: after 2.2 s. */
#define REPAIR_REPEATS 6u

/* With the lock: a work request on this channel has completed with an error. */
int repair_begin(struct channel* channel, enum ibv_wc_status status);

/* With the lock: nothing is confirmed, though nothing says that the queue pair is broken; one that was idle for too
 * long is like this. Those of both channels of the cable are made anew, once until something is confirmed. */
int repair_silent(struct channel* channel);

/* Without the lock, which the side channel must not wait for: tells the peers of queue pairs that were made anew. */
void repair_tell(struct engine* engine);

/* Without the lock: a message of the side channel. False if it is none of a repair. */
bool repair_take(struct engine* engine, struct peer* peer, const void* bytes, uint64_t length, int* status);

#endif
