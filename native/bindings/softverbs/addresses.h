/* The second address of a device: an IPv4 one, as programs look for and RoCE v2 and Thunderbolt have. It is one of
 * 240.0.0.0/4, which no interface has, and stands for the memory of this context; for other hosts a context would need
 * a key. */
#ifndef MLXDIST_SOFTVERBS_ADDRESSES_H
#define MLXDIST_SOFTVERBS_ADDRESSES_H

#include "../../verbs/verbs_abi.h"

void addresses_get_ipv4(struct ibv_context* context, union ibv_gid* gid);

/* Replaces IPv4 at both ends by what the provider knows. 0, EINVAL, or ENOENT or EACCES if the peer is not found. */
int addresses_find(struct ibv_ah_attr* peer);

#endif
