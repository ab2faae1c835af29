/* RDMA_WRITE. */
#pragma once

#include "soft.h"

/* false: it was dropped, as a key, a range or the access is wrong, or there is no receive for its immediate data. */
bool soft_write(struct soft_qp* qp, const struct ibv_send_wr* wr, enum ibv_wc_status* status);
