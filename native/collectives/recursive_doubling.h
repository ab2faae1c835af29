/*
 * Recursive doubling: log2(n) steps, with partners at distance 1, 2, 4 ... For small messages among many ranks, where
 * the number of messages counts (Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
 * operations in MPICH").
 */
#pragma once

#include "chunks.h"

/* Reduces `in` of all ranks into `out` on every rank: at most (log2(n) + 1) S bytes a rank, rounded at each step.
 * Where n is no power of two, the first ranks join in pairs before and part again afterwards. */
void recursive_doubling_all_reduce(struct operation* operation, const struct reduction* reduction, const char* in,
                                   char* out);

/* Ends once every rank has come: the dissemination barrier (Hensgen, Finkel and Manber 1988). */
void recursive_doubling_barrier(struct operation* operation);
