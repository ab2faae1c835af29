/*
 * The mesh: every rank exchanges directly with every other. What the collectives in this folder share.
 *
 * With the slots of the endpoint a mesh is the best that a full wiring allows: two ranks are its smallest
 * case, and each byte crosses one link.
 */
#ifndef MLXDIST_COLLECTIVES_MESH_H
#define MLXDIST_COLLECTIVES_MESH_H

#include "exchange.h"

/* The kernel of a reduction, or NULL with the reason given. */
fold_kernel mesh_kernel(const char *name, const mlxdist_layout *layout, int32_t op);

/* Part of an array of `count` elements that belongs to a rank, in bytes: parts differ by one element at most. */
struct part {
  uint64_t offset, bytes;
};
struct part part_of(uint64_t count, uint32_t element_bytes, int32_t rank, int32_t size);

/* One stream to and one from every peer, in rank order; the caller fills in data and bytes. */
struct mesh {
  mlxdist_group *group;
  struct stream out[GROUP_MAX_RANKS], in[GROUP_MAX_RANKS];
  int peers;
};
void mesh_init(struct mesh *mesh, mlxdist_group *group);
int mesh_run(struct mesh *mesh, const struct wire_descriptor *descriptor, struct fold *fold);

/* An empty message to every peer and one from each: returns once every rank has come. */
int mesh_meet(mlxdist_group *group, enum wire_operation operation);

/* Every rank sends all of `in`, and reduces all that arrives into `out`. */
int mesh_reduce_all(mlxdist_group *group, const struct wire_descriptor *descriptor, fold_kernel kernel, const char *in,
                    char *out, uint64_t bytes, uint32_t element_bytes);

/* Every rank sends to each peer its part of `in`, and reduces its own part into `out`. */
int mesh_reduce_parts(mlxdist_group *group, const struct wire_descriptor *descriptor, fold_kernel kernel,
                      const char *in, char *out, uint64_t count, uint32_t element_bytes);

/* Every rank sends its part, which lies in `out` already or at `own`, to all; the others' parts arrive in `out`. */
int mesh_gather_parts(mlxdist_group *group, const struct wire_descriptor *descriptor, const char *own, char *out,
                      uint64_t count, uint32_t element_bytes);

#endif
