/* See addresses.h. */
#define _GNU_SOURCE 1
#include "addresses.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <string.h>
#include <sys/socket.h>

static const uint8_t prefix[12] = {[10] = 0xff, [11] = 0xff};

static void add(struct soft_addresses *addresses, const struct ifaddrs *interfaces, bool loopback) {
  for (const struct ifaddrs *i = interfaces; i && addresses->count < SOFT_MAX_ADDRESSES; i = i->ifa_next) {
    if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || !(i->ifa_flags & IFF_UP)) continue;
    if (loopback == !(i->ifa_flags & IFF_LOOPBACK)) continue;
    struct sockaddr_in address;
    memcpy(&address, i->ifa_addr, sizeof address);
    addresses->list[addresses->count++] = address.sin_addr;
  }
}

void soft_addresses_read(struct soft_addresses *addresses) {
  struct ifaddrs *interfaces;
  addresses->count = 0;
  if (getifaddrs(&interfaces)) return;
  add(addresses, interfaces, false);
  add(addresses, interfaces, true);
  freeifaddrs(interfaces);
}

void soft_address_to_gid(struct in_addr address, union ibv_gid *gid) {
  memcpy(gid->raw, prefix, sizeof prefix);
  memcpy(gid->raw + sizeof prefix, &address, sizeof address);
}

bool soft_address_from_gid(const union ibv_gid *gid, struct in_addr *address) {
  if (memcmp(gid->raw, prefix, sizeof prefix) != 0) return false;
  memcpy(address, gid->raw + sizeof prefix, sizeof *address);
  return address->s_addr != 0;
}
