/*
 * The ring: every rank sends to the next and receives from the one before, n - 1 times.
 *
 * It needs two connections a rank, moves as few bytes as any algorithm (2 (n-1)/n S for all_reduce), and takes
 * n - 1 message times each way (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
 * workstations"). The order is that of the cables (wires.h), not of the ranks. The part of the rank at
 * position q is reduced in the order of positions q+1, q+2, ..., q, and rounded at each step.
 */
#ifndef MLXDIST_COLLECTIVES_RING_H
#define MLXDIST_COLLECTIVES_RING_H

#include "parts.h"

/* INVALID_ARGUMENT where the cables of the group make no ring. */
int ring_check(const mlxdist_group* group, const char* name);

/* As mesh_reduce_parts. `partial`: memory for all parts of the array, or NULL for memory of the operation's own. */
void ring_reduce_parts(struct operation* operation, const struct reduction* reduction, const char* in, char* partial,
                       char* out);

/* As mesh_gather_parts. */
void ring_gather_parts(struct operation* operation, const struct parts* parts, const char* own, char* out);

/* The root's `data` from one to the next, in pieces, so that all pass them on at the same time: S bytes a rank. */
void ring_broadcast(struct operation* operation, char* data, uint64_t bytes, int32_t root);

/* Ends once every rank has come. */
void ring_meet(struct operation* operation);

#endif
