/*
 * Meetings: no GPU work may wait long for a peer.
 *
 * MLX submits GPU work that waits for a lazy operation as soon as it has handed the operation to the thread of its
 * transfer, and macOS ends GPU work that waits for about 5 s. So the thread that hands it over first waits on the CPU
 * until the peers have come to the operation too, where it is not certain that they keep up: where nothing was heard of
 * one for options.meet_after, and during MEETING_OPERATIONS operations after the start and after each that a peer was
 * late for, since a rank that compiles kernels does so in the middle of its first graphs.
 *
 * Each rank counts, for each peer, the ordered collectives (operation.h) and the sends that it has come to, whether it
 * hands them over or calls them directly. Both ranks of a pair number these alike, but where threads use several
 * groups at the same time: then a meeting may end as many operations too early or too late as are in another order
 * on the peer. Acknowledgements carry the counts. One with WIRE_MEET requests another one once the receiver has come to
 * a certain operation, and is retransmitted until that has come. A collective waits for its members' collectives, a
 * receiver for the sender's sends, a sender for nothing. A rank without a GPU waits for no peer, but counts and
 * answers.
 *
 * Why no program that ends without meetings waits for ever with them. A meeting holds up one thread, and waits for a
 * peer P. If it never ends, P waits for another rank, and so on, in a circle that comes back to the rank of a meeting:
 * without one the program would be stuck anyway. Whatever the threads of a rank wait for, between ranks each step
 * of the circle is a meeting or an operation that has begun.
 *  - All steps are meetings: each request carries the set of ranks that wait for its sender, by the requests that
 *    it has not answered itself. It is retransmitted at once when the set grows, so each soon has the whole circle, and
 *    a rank that finds itself in the set of such a request ends its meetings. Ranks that are equal modulo
 *    MEETING_SET_BITS share a bit, which can end a meeting too early, never too late.
 *  - Otherwise some operation that has begun waits for the rank R of a meeting. It retransmits `ready` for the
 *    transfer that it receives (timers.c), or its first messages lie here. If R has not begun that transfer for
 *    MEETING_NEEDED_NS, it ends its meetings. Left out are members of the operation that R meets for that have come to
 *    it, in its group: they wait for that operation, or for one that comes after it in their group here, too. That
 *    holds by the order of that group alone, whatever the counts are. And a member that has begun the operation
 *    itself, but not come to its number, since the groups are in another order there, is not left out: it ends the
 *    meeting. Such a meeting hands its operation over, as if there were no meetings. GPU work that R has encoded for
 *    earlier operations is submitted first (connection.cpp), as far as it is on the thread's default stream.
 */
#pragma once

#include "wire.h"

#include <stdatomic.h>
#include <stdbool.h>

struct operation;

/* More than the collectives of a forward pass: the kernels of the backward pass are compiled after it. */
#define MEETING_OPERATIONS 256u

/* An operation that was handed over before the meeting may need this long to begin. */
#define MEETING_NEEDED_NS 1000000000u

enum meeting_kind { MEETING_COLLECTIVES, MEETING_SENDS, MEETING_KINDS };

/* The request of an acknowledgement with WIRE_MEET, in `offset`: bits 0 to 29 are the set of ranks, 30 is set for
 * MEETING_SENDS, 31 where an earlier request found no answer, and the rest is the number that is waited for. */
#define MEETING_SET_BITS 30
#define MEETING_OF_SENDS (1u << 30)
#define MEETING_REPEATS (1u << 31)

/* Of one peer. The thread that evaluates reads and counts without the engine's lock. */
struct meeting {
  atomic_uint arrived[MEETING_KINDS];   /* operations with the peer that this rank has come to */
  atomic_uint received;                 /* and those that receive from it */
  atomic_uint there[MEETING_KINDS];     /* what the peer has come to, as far as is known */
  atomic_uint until;                    /* the operations up to this one meet in any case, of all three counts */
  atomic_uint requests;                 /* a mask of kinds: the peer waits until this rank has come to */
  atomic_uint requested[MEETING_KINDS]; /* that one */
  _Atomic uint64_t heard_ns;            /* when an operation last showed that the peer had come to it; 0: never */

  /* With the lock. */
  uint32_t waiting;                  /* the set of its last request */
  uint32_t announced[MEETING_KINDS]; /* the counts that the peer was sent last */
  uint64_t request;                  /* to it, the next one */
};

void meeting_init(struct meeting* meeting);

/* Operations of all kinds: both ranks have the same at the same operation. */
uint32_t meeting_total(const struct meeting* meeting);

/* Operations that meet in any case, after those that this rank has come to. Far too many where `until` is past. */
uint32_t meeting_left(const struct meeting* meeting, uint32_t until);
uint32_t meeting_until(const struct meeting* meeting);

/* Whether the peer waits for a count, of that kind or of any, that this rank has reached. */
bool meeting_owes(const struct meeting* meeting, int kind);
static inline bool meeting_owes_response(const struct meeting* meeting) {
  return meeting->requests && (meeting_owes(meeting, MEETING_COLLECTIVES) || meeting_owes(meeting, MEETING_SENDS));
}
void meeting_forget_answered(struct meeting* meeting);

/* All below with the lock. An operation has ended well, so its peers had come to it. */
void meeting_heard(const struct operation* operation, uint64_t now_ns);

/* An acknowledgement has come, or is about to leave; true: it is one for a meeting. */
void meeting_read(struct meeting* meeting, const struct wire_header* header);
bool meeting_write(struct meeting* meeting, struct wire_header* header);

/* What the peer has come to, and what it waits for. The lower one of two requests stays: the other is retransmitted. */
void meeting_take_counts(struct meeting* meeting, const uint32_t* counts, uint32_t until);
void meeting_take_request(struct meeting* meeting, uint64_t request);
