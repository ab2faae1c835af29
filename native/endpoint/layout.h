/* Layouts: dtype and shape of an array, checked, counted and put into words. */
#ifndef MLXDIST_ENDPOINT_LAYOUT_H
#define MLXDIST_ENDPOINT_LAYOUT_H

#include "mlxdist.h"
#include "wire.h"

#include <stdbool.h>
#include <stddef.h>

#define LAYOUT_DIMENSIONS 6

/* Refuses an unknown dtype, a negative dimension and a size beyond 64 bits. NULL passes: no array. */
int layout_check(const char* operation, const mlxdist_layout* layout);

uint64_t layout_count(const mlxdist_layout* layout);
uint64_t layout_bytes(const mlxdist_layout* layout);

/* The descriptor of a stream of `bytes` in an operation on such an array. `layout` NULL: no array. */
struct wire_descriptor layout_describe(enum wire_operation operation, const mlxdist_layout* layout, int32_t reduction,
                                       int32_t root, enum mlxdist_algorithm algorithm);

/* "all_sum", and whether such an operation has an array. */
const char* layout_operation(const struct wire_descriptor* descriptor);
bool layout_has_array(const struct wire_descriptor* descriptor);

/* "all_sum #7 of float32 [3, 4]", "broadcast with root 1 of int8 []", "barrier". `sequence` 0: without a number. */
void layout_name(const struct wire_descriptor* descriptor, uint64_t sequence, char* text, size_t bytes);

#endif
