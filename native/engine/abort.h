/* Aborts: a rank that fails ends all its operations, and sends every peer its first error. */
#pragma once

#include "engine.h"

/* Fails all groups with the text of mlxdist_last_error() and sends an abort to every peer. `operation`: where it
 * happened, or NULL. */
void engine_fail(struct engine* engine, const struct operation* operation, int status);

/* The same with a text that says already where that is. */
void engine_fail_all(struct engine* engine, const struct operation* operation, int status);

/* All operations end with the failure that there is. */
void engine_end_all(struct engine* engine);

/* An abort has arrived. It ends no operation by itself: the peer may have failed in a later one, and then what it sent
 * before is all that is missing here, and the result is what the others have (transfer.c). */
void abort_receive(struct peer* peer, const struct recv_desc* desc);
