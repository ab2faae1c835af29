/* See addresses.h. */
#include "addresses.h"

#include "../../providers/soft/soft.h"

#include <arpa/inet.h>
#include <errno.h>

#define FIRST UINT32_C(0xf0000000) /* 240.0.0.0 */

void addresses_get_ipv4(struct ibv_context *context, union ibv_gid *gid) {
  struct in_addr address = {htonl(FIRST + segment_number(soft_context(context)->segment))};
  soft_address_to_gid(address, gid);
}

int addresses_find(struct ibv_ah_attr *peer) {
  struct in_addr address;
  if (peer->grh.sgid_index > 1) return EINVAL;
  peer->grh.sgid_index = 0;
  if (!soft_address_from_gid(&peer->grh.dgid, &address)) return 0;
  if (ntohl(address.s_addr) < FIRST) return ENOENT;
  return segment_find(ntohl(address.s_addr) - FIRST, &peer->grh.dgid);
}
