/* Devices that are the end of one cable. */
#pragma once

#include "../soft.h"

/* False if this process uses the device in another context too, as the same host, and may not. */
bool soft_single_peer_claim(struct soft_context* context);
void soft_single_peer_release(struct soft_context* context);
/* Before and after a queue pair is connected: ETIMEDOUT if the peer is not at the other end. */
int soft_single_peer_check(const struct soft_context* context, const struct ibv_ah_attr* peer);
void soft_single_peer_connect(struct soft_context* context, const struct ibv_ah_attr* peer);
