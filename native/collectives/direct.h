/*
 * The mesh: every rank exchanges directly with every other.
 *
 * It needs a connection between every two. Then it is the best there is: each byte crosses one link, a reduction
 * takes one message time, and a sum is rounded once, since every owner gets all pieces.
 */
#pragma once

#include "chunks.h"

/* The first three work among a subset of the group, of n members; chunks are those of its places. */

/* Every rank sends all of `in` to all, and reduces all that arrives into `out`: (n-1) S bytes a rank. */
void direct_all_reduce(struct operation* operation, const struct subset* subset, const struct reduction* reduction,
                       const char* in, char* out);

/* Every rank sends to each peer its part of `in`, and reduces its own part into `out`: (n-1)/n S bytes. */
void direct_reduce_scatter(struct operation* operation, const struct subset* subset, const struct reduction* reduction,
                           const char* in, char* out);

/* Every rank sends its part, at `own`, to all; all chunks come together in `out`: (n-1)/n of `out`. */
void direct_all_gather(struct operation* operation, const struct subset* subset, const struct chunks* chunks,
                       const char* own, char* out);

/* Each rank sends chunk j of `in`, of `bytes` bytes, to member j: (n-1)/n of `in`. */
void direct_all_to_all(struct operation* operation, uint64_t bytes, const char* in, char* out);

/* All ranks' `in` to the root, which reduces them into `out`. Rounded once. */
void direct_reduce(struct operation* operation, const struct reduction* reduction, const char* in, char* out,
                   int32_t root);

/* The root's `data` to all. */
void direct_broadcast(struct operation* operation, char* data, uint64_t bytes, int32_t root);

/* The star, an all_reduce: to the first rank and back, 2 (n-1) messages in all, the fewest there can be. */
void direct_star(struct operation* operation, const struct reduction* reduction, const char* in, char* out);

/* An empty message to everyone and one from each: ends once every rank has come. */
void direct_barrier(struct operation* operation);
