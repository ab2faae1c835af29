/*
 * The ring: every rank sends to the next and receives from the one before, n - 1 times.
 *
 * It needs two connections a rank, moves as few bytes as any algorithm (2 (n-1)/n S for all_reduce), and takes
 * n - 1 message times each way (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
 * workstations"). The order is that of the links (topology.h), not of the ranks. The part of the rank at
 * position q is reduced in the order of positions q+1, q+2, ..., q, and rounded at each step.
 */
#pragma once

#include "chunks.h"

/* As direct_reduce_scatter. `partial`: memory for all chunks of the array, or NULL for memory of the operation's own.
 */
void ring_reduce_scatter(struct operation* operation, const struct reduction* reduction, const char* in, char* partial,
                         char* out);

/* As direct_all_gather. */
void ring_all_gather(struct operation* operation, const struct chunks* chunks, const char* own, char* out);

/* The root's `data` from one to the next, in pieces, so that all pass them on at the same time: S bytes a rank. */
void ring_broadcast(struct operation* operation, char* data, uint64_t bytes, int32_t root);

/* Ends once every rank has come. */
void ring_barrier(struct operation* operation);
