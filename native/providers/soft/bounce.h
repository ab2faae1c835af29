/* Receives into memory that peers cannot reach. */
#pragma once

#include "soft.h"

/* Memory for the next receive of the queue pair. EINVAL: the context has none; ENOMEM: the arena is full. */
int soft_bounce_reserve(struct soft_qp* qp, uint32_t length);
/* The address to publish for a receive into `sge`: in the arena. */
uint64_t soft_bounce_post(struct soft_qp* qp, const struct ibv_sge* sge);
void soft_bounce_take(struct soft_qp* qp, const struct ibv_wc* wc);
/* Without a copy. */
void soft_bounce_drop(struct soft_qp* qp, uint64_t position);
/* Gives those that no receive has back to the arena. */
void soft_bounce_empty(struct soft_context* context);
