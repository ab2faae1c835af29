/* The binomial tree: log2(n) steps from or to the root, for small messages among many ranks. */
#pragma once

#include "chunks.h"

/* The root's `data` to everyone. */
void tree_broadcast(struct operation* operation, char* data, uint64_t bytes, int32_t root);

/* The reduction of all ranks' `in` to the root's `out`, rounded at each level. */
void tree_reduce(struct operation* operation, const struct reduction* reduction, const char* in, char* out,
                 int32_t root);
