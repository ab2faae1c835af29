/*
 * Deadlines: how long an operation may make no progress, and what is logged meanwhile.
 *
 * There are two, for two different questions. A rank that has come to the operation and then sends nothing more
 * for `timeout` has most likely been stopped or cut off. One that has not come yet may be computing or loading
 * a model: it has `entry_timeout`. That it died is known from the side channel long before either.
 */
#pragma once

#include "operation.h"

/* The operation has made progress: the first stall warning comes next. */
static inline void deadline_restart(struct operation* operation) { operation->stall_warned_at = 0; }

/* With the lock: logs that the operation makes no progress, and fails when that takes too long. */
int deadline_check(struct operation* operation, uint64_t now_ns);

/* With the lock: the same for a thread that waits until `rank` has come to `operation`, which it has not handed over
 * yet. The limit is entry_timeout: other deadlines count from when the operation is carried out. */
int deadline_meet(const struct engine* engine, const char* operation, int32_t rank, double waited,
                  double* stall_warned_at);

/* TIMEOUT, or MLXDIST_OK: ranks that are not connected yet are late for the operation, since `waited` seconds. */
int deadline_connect(const struct engine* engine, double operation_timeout, int32_t rank, double waited);
