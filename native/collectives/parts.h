/* What the collectives in this folder share: how they begin, the parts of an array that belong to ranks, kernels. */
#ifndef MLXDIST_COLLECTIVES_PARTS_H
#define MLXDIST_COLLECTIVES_PARTS_H

#include "operation.h"

/* An array of `count` elements, cut into one part per rank: parts differ by one element at most. */
struct parts {
  uint64_t count;
  uint32_t element_bytes;
  int32_t size;
};
uint64_t part_offset(const struct parts* parts, int32_t rank); /* in bytes */
uint64_t part_bytes(const struct parts* parts, int32_t rank);
uint64_t part_most_bytes(const struct parts* parts);

/* A reduction of an array: its kernel and its parts. */
struct reduction {
  fold_kernel kernel;
  struct parts parts;
  uint64_t bytes; /* of the whole array */
};

/* INVALID_ARGUMENT for a wrong layout, and for a reduction that does not exist. */
int reduction_prepare(struct reduction* reduction, const char* name, const mlxdist_group* group,
                      const mlxdist_layout* layout, int32_t op);

/* A new operation, if the cables allow its algorithm. */
int collective_new(mlxdist_group* group, const char* name, const struct wire_descriptor* descriptor,
                   struct operation** operation);

int check_root(const mlxdist_group* group, const char* name, int32_t root);

/* The first dimension of `layout` must be a multiple of the group's size. */
int check_divisible(const mlxdist_group* group, const char* name, const mlxdist_layout* layout);

#endif
