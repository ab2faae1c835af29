/*
 * Reconnecting: a queue pair that has failed is re-created, and what the peer has not acknowledged is retransmitted.
 *
 * A completion with an error leaves the queue pair in the state ERR: nothing leaves it or arrives any more, and its
 * peer's half does not know. Both halves are destroyed and re-created, with a number (epoch) that is one higher, and
 * connected as they were at first, through the side channel:
 *
 *   RECONNECT_REQ     address of the sender's new queue pair
 *   RECONNECT_REP     its receives are posted: the receiver of this may send, from the first message that is missing
 *
 * Either side may begin, or both at once: the higher epoch counts. Sequence numbers, messages that were not
 * acknowledged and those that no operation has taken yet stay, so operations go on where they were. Completions of the
 * old queue pair carry the old epoch, and are discarded.
 *
 * Rejected: to move the old queue pair through RESET. Apple's provider does not allow ERR, and other drivers leave
 * completions of before the reset in the queue.
 */
#pragma once

#include "endpoint.h"

/* Queue pairs of a channel that may fail, one after the other, before one of them has carried anything. */
#define RECONNECT_MAX 8u

/* A message was retransmitted this often when its queue pair seems to carry nothing any more: after 2.2 s. */
#define RECONNECT_RETRIES 6u

struct reconnect_message {
  uint32_t magic;
  uint32_t step;
  uint32_t channel, epoch;
  uint32_t qp_num, psn;
  uint32_t received; /* sequence of the last message that the sender of this has */
  uint16_t credits;  /* receives that it has for later ones */
  uint16_t lid;
  union ibv_gid gid;
};

/* A first packet number that nothing of an earlier connection has. */
uint32_t reconnect_random_psn(void);

/* A work request on this channel has completed with an error. */
int reconnect_begin(struct channel* channel, enum ibv_wc_status status);

/* Nothing is acknowledged, though nothing says that the queue pair is broken; one that was idle for too long is like
 * this. Those of both channels of the link are re-created, once until something is acknowledged. */
int reconnect_silent(struct channel* channel);

/* Something is acknowledged: the queue pair carries. */
static inline void reconnect_forget(struct channel* channel) { channel->reconnects = 0; }

/* The next message for the side channel, about a queue pair that the peer has not heard of. False: there is none. It is
 * to be sent without the lock, which the side channel must not wait for. */
bool reconnect_next(struct endpoint* endpoint, struct reconnect_message* message);

/* Whether bytes of the side channel are such a message. */
bool reconnect_read(const struct endpoint* endpoint, const void* bytes, uint64_t length,
                    struct reconnect_message* message);

/* Such a message has arrived. True: `reply` is to be sent, after those of reconnect_next. */
bool reconnect_receive(struct endpoint* endpoint, const struct reconnect_message* message,
                       struct reconnect_message* reply);
