/* Completion queues. */
#pragma once

#include "soft.h"

struct ibv_cq* soft_create_cq(struct ibv_context* context, int cqe, void* cq_context, struct ibv_comp_channel* channel,
                              int comp_vector);
int soft_destroy_cq(struct ibv_cq* cq);
int soft_poll_cq(struct ibv_cq* cq, int num_entries, struct ibv_wc* wc);
void soft_cq_attach(struct soft_qp* qp);
void soft_cq_detach(struct soft_qp* qp);
/* Forgets the completions of a queue pair that is reset or destroyed. */
void soft_cq_discard(struct soft_qp* qp);
