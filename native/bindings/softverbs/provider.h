/* The provider behind the exported names. */
#pragma once

#include "../../providers/soft/soft.h"
#include "softverbs.h"

static inline const struct verbs* verbs_of(struct ibv_context* context) {
  return verbs_soft_profile(soft_context(context)->profile->name);
}

/* `call` under the lock of the context. */
#define LOCKED(of, call)                  \
  __extension__({                         \
    struct ibv_context* locked = (of);    \
    pthread_mutex_lock(&locked->mutex);   \
    __typeof__(call) result = (call);     \
    pthread_mutex_unlock(&locked->mutex); \
    result;                               \
  })

/* devices.c: replaces IPv4 at both ends by what the provider knows. 0, EINVAL, or ENOENT or EACCES if the peer is not
 * found. */
int find_address(const struct ibv_context* context, struct ibv_ah_attr* peer);
