/*
 * Matching: which stream an arrived message belongs to.
 *
 * A message names its group and stream. It goes to the stream that expects it; if none does yet it is early and waits.
 * The collectives of a group must come in one order on all its ranks: each message says which one it belongs to, so
 * that two ranks that are in different operations of a group fail at once. Groups have no order among each other, since
 * each may have threads of its own; ranks that wait for each other in different groups are found by standstill.h.
 */
#ifndef MLXDIST_ENDPOINT_MATCHING_H
#define MLXDIST_ENDPOINT_MATCHING_H

#include "stream.h"

/* Gives a message to the stream that expects it, or keeps it. */
int matching_deliver(struct peer* peer, struct arrival* arrival);

/* `stream` expects messages from its peer from now on; those that are early are given to it. */
void matching_expect(struct stream* stream);

/* Whether what has come from `peer`, and nobody expects, belongs to a place in the order that has been taken. */
int matching_check_early(const struct peer* peer);

/* What `peer` has sent for operations that cannot go on makes room for others, if there may be others. */
int matching_make_room(struct peer* peer);

/* `stream` has ended: gives back what it did not take. */
int matching_forget(struct stream* stream);

/* Notes how far the peer has come with the streams of a group. */
void matching_read_ready(struct peer* peer, const struct wire_header* header);

/* MISMATCH with a text that names both sides. `theirs` is what `peer` does in the same group. */
int matching_fail(const struct operation* ours, const struct peer* peer, const struct wire_descriptor* theirs,
                  uint64_t expected_bytes);

#endif
