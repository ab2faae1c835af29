/* A link: this rank's end of one way to a peer. A device may serve many ranks (a network adapter), or one (a
 * Thunderbolt port); two ranks may be joined by several. */
#pragma once

#include "device.h"

struct channel;
struct endpoint;

struct link {
  struct device* device;
  enum ibv_mtu mtu; /* of both ends */
  int32_t gid_index;
  union ibv_gid gid; /* the address of that index in the device's table: by it the peer reaches this rank */
  struct {
    char* memory;
    uint64_t bytes;
    struct ibv_mr* mr;
  } slab; /* all slots: one registration, since devices allow few */
};

/* Allocates the slab, and registers it; the latter once the queue pairs over it exist. */
int link_allocate_slab(struct link* link, int32_t peer, uint64_t bytes);
int link_register_slab(struct link* link);
void link_free_slab(struct link* link);

/* A link that works and is not `link`; -1 if there is none. */
int32_t link_other(const struct endpoint* endpoint, uint32_t link);

/* Nothing leaves by the link any more until it works again; there is another one. `why`: a clause for the debug output.
 */
void link_drop(struct endpoint* endpoint, uint32_t link, const char* why);

/* The port of the channel's link is down: nothing is posted there any more. TRANSPORT if there is no other link. */
int link_port_down(struct channel* channel);

/* A queue pair of the link has failed and is not re-created: the link is dead, if there is another one. */
bool link_give_up(struct channel* channel, const char* why);
