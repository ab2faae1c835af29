/*
 * Matching: which transfer an arrived message belongs to.
 *
 * A message names its group and transfer. It goes to the transfer that expects it; if none does yet it is unexpected
 * and waits. The collectives of a group must come in one order on all its ranks: each message says which one it belongs
 * to, so that two ranks that are in different operations of a group fail at once. Groups have no order among each
 * other, since each may have threads of its own; ranks that wait for each other in different groups are found by
 * deadlock.h.
 */
#pragma once

#include "transfer.h"

/* Gives a message to the transfer that expects it, or keeps it. */
int matching_deliver(struct peer* peer, struct recv_desc* desc);

/* `transfer` expects messages from its peer from now on; those that came before are given to it. */
void matching_post(struct transfer* transfer);

/* Whether what has come from `peer`, and no transfer expects, belongs to a place in the order that has been taken. */
int matching_check_unexpected(const struct peer* peer);

/* What `peer` has sent for operations that cannot go on leaves its slots to others, if there may be others. */
int matching_free_slots(struct peer* peer);

/* `transfer` has ended: gives back what it did not take. */
int matching_remove(struct transfer* transfer);

/* Notes how far the peer has come with the transfers of a group. */
void matching_on_cts(const struct peer* peer, const struct wire_header* header);

/* The next acknowledgement says that this rank receives that transfer. There is room for one group in it: what another
 * one has left there is sent first. */
int matching_send_cts(struct peer* peer, uint16_t group, uint32_t transfer);

/* MISMATCH with a text that names both sides. `theirs` is what `peer` does in the same group. */
int matching_fail(const struct operation* ours, const struct peer* peer, const struct wire_descriptor* theirs,
                  uint64_t expected_bytes);
