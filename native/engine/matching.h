/*
 * Matching: which transfer an arrived message belongs to.
 *
 * A message names its group, the place of its operation in the order of that group (places.h), and which transfer of
 * the operation it belongs to. It goes to the transfer that expects it; if none does yet it is unexpected and waits.
 * Two ranks that have issued different operations in one place fail at once. Groups have no order among each other,
 * since each may have threads of its own; ranks that wait for each other in different groups are found by deadlock.h.
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

/* A clear to send has come: for the transfers of an operation here, or of one that is issued later. */
void matching_on_cts(struct peer* peer, const struct wire_header* header);
void matching_take_early_cts(struct transfer* transfer);

/* The next acknowledgement says that this rank receives that transfer. There is room for one in it: another one that
 * waits to leave is sent first. */
int matching_send_cts(const struct transfer* transfer);

/* MISMATCH with a text that names both sides. `header` and `theirs` are of what `peer` does in the same place. */
int matching_fail(const struct operation* ours, const struct peer* peer, const struct wire_header* header,
                  const struct wire_descriptor* theirs, uint64_t expected_bytes);
