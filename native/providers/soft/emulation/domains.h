/* Protection domains of a device that leaks them. */
#pragma once

#include "../soft.h"

/* One of `max_pd`; 0, ENOMEM if all are taken, or what went wrong. */
int soft_domain_take(const struct soft_context* context, uint32_t* domain);
void soft_domain_return(const struct soft_context* context, uint32_t domain);
