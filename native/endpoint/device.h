/* A device that messages leave through: one for each cable. The engine sees it through the verbs table only. */
#ifndef MLXDIST_ENDPOINT_DEVICE_H
#define MLXDIST_ENDPOINT_DEVICE_H

#include "verbs.h"

#include <stdbool.h>

struct device {
  const struct verbs *verbs;
  struct ibv_context *context;
  struct ibv_pd *pd;
  struct ibv_cq *cq;
  struct ibv_port_attr port;
  union ibv_gid gid;
  bool gathers; /* a send may be put together from two places */
  bool whole_frames; /* a send must have as many frames as the receive that it meets, */
  uint32_t max_frames; /* of which a queue takes so many */
};

/* Opens the `index`-th device of the provider, for this rank, which plays a host of its own where it can. */
int device_open(struct device *device, const struct verbs *verbs, int index, int32_t rank);

/* `entries`: completions that can be outstanding. */
int device_create_cq(struct device *device, int entries);
void device_close(struct device *device);

#endif
