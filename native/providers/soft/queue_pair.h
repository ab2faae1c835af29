/* Queue pairs: their life and their states. */
#pragma once

#include "soft.h"

struct ibv_qp* soft_create_qp(struct ibv_pd* pd, struct ibv_qp_init_attr* attr);
int soft_modify_qp(struct ibv_qp* qp, struct ibv_qp_attr* attr, int attr_mask);
int soft_query_qp(struct ibv_qp* qp, struct ibv_qp_attr* attr, int attr_mask, struct ibv_qp_init_attr* init_attr);
int soft_destroy_qp(struct ibv_qp* qp);
