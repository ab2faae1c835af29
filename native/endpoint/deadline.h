/*
 * Deadlines: how long an operation may stand still, and what is said meanwhile.
 *
 * There are two, for two different questions. A rank that has come to the operation and then lets nothing more be
 * heard for `timeout` has most likely been stopped or cut off. One that has not come yet may be computing or loading
 * a model: it has `entry_timeout`. That it died is known from the side channel long before either.
 */
#ifndef MLXDIST_ENDPOINT_DEADLINE_H
#define MLXDIST_ENDPOINT_DEADLINE_H

#include "operation.h"

/* What this thread, or else the group, has set; negative: the two of the options. */
double deadline_for(const mlxdist_group* group);

/* With the lock: notes in the debug output that the operation stands still, and fails when it does so for too long. */
int deadline_look(struct operation* operation, uint64_t now_ns);

/* A wait of this many seconds or more is kept in engine->late. */
#define DEADLINE_LATE_S 1.0

/* With the lock: the same for a thread that waits until `rank` has come to `operation`, which it has not handed over
 * yet. The limit is entry_timeout: other deadlines count from when the operation is carried out. */
int deadline_meet(const struct engine* engine, const char* operation, int32_t rank, double waited, double* noticed_at);

/* TIMEOUT, or MLXDIST_OK: ranks that are not connected yet are late for the operation, since `waited` seconds. */
int deadline_connect(const struct engine* engine, int32_t rank, double waited);

#endif
