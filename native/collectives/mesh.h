/*
 * The mesh: every rank exchanges directly with every other.
 *
 * It needs a connection between every two. Then it is the best there is: each byte crosses one link, a reduction
 * takes one message time, and a sum is rounded once, since every owner gets all pieces.
 */
#ifndef MLXDIST_COLLECTIVES_MESH_H
#define MLXDIST_COLLECTIVES_MESH_H

#include "parts.h"

/* Every rank sends all of `in` to all, and reduces all that arrives into `out`: (n-1) S bytes a rank. */
void mesh_reduce_all(struct operation* operation, const struct reduction* reduction, const char* in, char* out);

/* Every rank sends to each peer its part of `in`, and reduces its own part into `out`: (n-1)/n S bytes. */
void mesh_reduce_parts(struct operation* operation, const struct reduction* reduction, const char* in, char* out);

/* Every rank sends its part, at `own`, to all; all parts come together in `out`: (n-1)/n of `out`. */
void mesh_gather_parts(struct operation* operation, const struct parts* parts, const char* own, char* out);

/* An empty message to everyone and one from each: ends once every rank has come. */
void mesh_meet(struct operation* operation);

#endif
