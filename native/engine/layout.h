/* Layouts: dtype and shape of an array, checked, counted and put into words. */
#pragma once

#include "mlxdist.h"
#include "wire.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define LAYOUT_DIMENSIONS 6

/* Refuses an unknown dtype, a negative dimension and a size beyond 64 bits. NULL passes: no array. */
int layout_check(const char* operation, const mlxdist_layout* layout);

#define LAYOUT_DTYPES 14
extern const uint32_t layout_element_bytes[LAYOUT_DTYPES];
static inline uint32_t layout_dtype_size(int32_t dtype) {
  return dtype >= 0 && dtype < LAYOUT_DTYPES ? layout_element_bytes[dtype] : 0;
}

static inline uint64_t layout_count(const mlxdist_layout* layout) {
  uint64_t elements = 1;
  for (int i = 0; i < layout->ndim; i++) elements *= (uint64_t)layout->shape[i];
  return elements;
}

static inline uint64_t layout_bytes(const mlxdist_layout* layout) {
  return layout_count(layout) * layout_dtype_size(layout->dtype);
}

/* The descriptor of a transfer of `bytes` in an operation on such an array. `layout` NULL: no array. */
static inline struct wire_descriptor layout_describe(int32_t operation, const mlxdist_layout* layout, int32_t reduction,
                                                     int32_t root, enum mlxdist_algorithm algorithm) {
  struct wire_descriptor descriptor = {.operation = (uint8_t)operation,
                                       .reduction = (uint8_t)reduction,
                                       .root = (int16_t)root,
                                       .algorithm = (uint8_t)algorithm};
  if (layout) {
    descriptor.dtype = (uint8_t)layout->dtype;
    descriptor.ndim = (uint8_t)layout->ndim;
    memcpy(descriptor.shape, layout->shape, sizeof descriptor.shape); /* with what stands behind the dimensions */
  }
  return descriptor;
}

/* "all_sum", and whether such an operation has an array. */
const char* layout_operation(const struct wire_descriptor* descriptor);
bool layout_has_array(const struct wire_descriptor* descriptor);

/* "send", "recv" or "sendrecv": which halves of a transfer between two ranks this one has. */
const char* layout_message(bool sends, bool receives);

/* "all_sum #7 of float32 [3, 4]", "broadcast with root 1 of int8 []", "barrier". `sequence` 0: without a number. */
struct layout_name {
  char text[192];
};
struct layout_name layout_name(const struct wire_descriptor* descriptor, uint64_t sequence);

/* " in group 2", " in mx.distributed", or "" for the world. */
struct group_name {
  char text[24];
};
struct group_name group_name(uint16_t id);
