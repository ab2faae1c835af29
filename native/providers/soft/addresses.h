/* The addresses of this machine, as a device's table has them: behind the one for shared memory an entry for each IPv4
 * address. */
#pragma once

#include "../../verbs/verbs_abi.h"

#include <netinet/in.h>
#include <stdbool.h>

#define SOFT_MAX_ADDRESSES 32 /* those behind are left out */

struct soft_addresses {
  int count;
  struct in_addr list[SOFT_MAX_ADDRESSES];
};

/* Of interfaces that are up: those that lead to other machines first, then those that lead back. A device reads them
 * once, as the places in its table must not change while it is open. None, where the system does not tell. */
void soft_addresses_read(struct soft_addresses* addresses);

/* ::ffff:a.b.c.d, as RoCE v2 writes it. */
void soft_address_to_gid(struct in_addr address, union ibv_gid* gid);
bool soft_address_from_gid(const union ibv_gid* gid, struct in_addr* address);
