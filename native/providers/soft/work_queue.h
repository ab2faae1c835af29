/* Posting: where the data moves. */
#pragma once

#include "soft.h"

int soft_post_send(struct ibv_qp* qp, struct ibv_send_wr* wr, struct ibv_send_wr** bad_wr);
int soft_post_recv(struct ibv_qp* qp, struct ibv_recv_wr* wr, struct ibv_recv_wr** bad_wr);
void soft_send_held(struct soft_context* context); /* those that may leave by now */
