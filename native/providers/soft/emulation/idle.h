/* The fault `idle`. */
#pragma once

#include "../soft.h"

void soft_idle_begin(struct soft_context* context);
void soft_idle_carried(struct soft_qp* qp);
bool soft_idle_is_silent(struct soft_qp* qp);
