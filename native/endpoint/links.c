#include "links.h"

#include "debug.h"
#include "frames.h"
#include "trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(MLXDIST_LINKS == WIRE_LINKS, "the wire has room for so many cables");

static int open_device(struct engine *engine, const struct verbs *verbs, const char *name, uint32_t cable) {
  struct device *device = &engine->devices[engine->device_count++];
  device->cable = cable;
  return device_open(device, verbs, name, engine->options.has_key ? engine->options.key : 0, (uint32_t)engine->rank);
}

/* The device of a link, opened when it is needed first. */
static int find_device(struct engine *engine, const mlxdist_link *link, uint32_t cable, struct device **result) {
  char why[ERROR_TEXT_BYTES];
  const struct verbs *verbs = verbs_provider(link->provider, engine->options.soft_profile, why, sizeof why);
  if (!verbs) return fail(MLXDIST_INVALID_ARGUMENT, "%s", why);
  if (engine->options.reliable && !verbs->reliable)
    return fail(MLXDIST_INVALID_ARGUMENT,
                "provider %s has no reliable connections (MLXDIST_QP_TYPE=rc); libibverbs has", verbs->name);
  verbs = trace_verbs(verbs);
  for (uint32_t i = 0; i < engine->device_count; i++) {
    *result = &engine->devices[i];
    if ((*result)->verbs == verbs && strcmp((*result)->name, link->device) == 0) return MLXDIST_OK;
  }
  *result = &engine->devices[engine->device_count];
  return open_device(engine, verbs, link->device, cable);
}

static int open_link(struct engine *engine, struct peer *peer, const mlxdist_link *from) {
  struct link *link = &peer->links[peer->link_count];
  int status = find_device(engine, from, peer->link_count, &link->device);
  if (status) return status;
  link->gid_index = from->gid_index;
  status = device_gid(link->device, link->gid_index, &link->gid);
  if (status) return status;
  peer->link_count++;
  return MLXDIST_OK;
}

static int open_links(struct engine *engine, struct peer *peer, const mlxdist_link *links, uint32_t room) {
  int status = MLXDIST_OK;
  for (uint32_t i = 0; i < room && links[i].provider && !status; i++) status = open_link(engine, peer, &links[i]);
  if (!status && !peer->link_count)
    return fail(MLXDIST_INVALID_ARGUMENT, "no device is named for messages from rank %d to rank %d", engine->rank,
                peer->rank);
  return status;
}

/* Each channel has at most its receives, and two windows of sends, outstanding. */
static int create_cq(struct engine *engine, struct device *device) {
  int entries = 0;
  for (int32_t rank = 0; rank < engine->size; rank++)
    for (uint32_t link = 0; link < engine->peers[rank].link_count; link++)
      if (engine->peers[rank].links[link].device == device)
        entries += 3 * (int)(engine->options.eager_slots + engine->options.bulk_slots);
  return device_create_cq(device, entries);
}

/* Devices of the software provider: the same to all, or, where each is the end of one cable, others to each in order of
 * their ranks. mlxdist/runtime/devices/links.py has the same rule. */
static int open_default_links(struct engine *engine, struct peer *peer) {
  char why[ERROR_TEXT_BYTES], names[MLXDIST_LINKS][16];
  mlxdist_link links[MLXDIST_LINKS];
  const struct verbs *verbs = verbs_provider("soft", engine->options.soft_profile, why, sizeof why);
  uint32_t cables = engine->options.cables, others = (uint32_t)(peer->rank - (peer->rank > engine->rank));
  uint32_t first = verbs && verbs->whole_frames ? cables * others : 0;
  for (uint32_t i = 0; i < cables; i++) {
    snprintf(names[i], sizeof names[i], "soft%u", first + i);
    links[i] = (mlxdist_link){.provider = "soft", .device = names[i]};
  }
  return open_links(engine, peer, links, cables);
}

/* "soft", or "ibverbs+soft" */
static void name_providers(struct engine *engine) {
  for (uint32_t i = 0; i < engine->device_count; i++) {
    const char *name = engine->devices[i].verbs->name;
    size_t length = strlen(engine->provider);
    if (strstr(engine->provider, name)) continue;
    snprintf(engine->provider + length, sizeof engine->provider - length, "%s%s", length ? "+" : "", name);
  }
}

int links_open(struct engine *engine, const mlxdist_link *links) {
  engine->devices = calloc((size_t)engine->size * WIRE_LINKS, sizeof *engine->devices);
  if (!engine->devices) return fail(MLXDIST_RESOURCES, "out of memory for the devices of %d ranks", engine->size);
  int status = MLXDIST_OK;
  for (int32_t rank = 0; rank < engine->size && !status; rank++) {
    if (rank == engine->rank || !engine_has_wire(engine, engine->rank, rank)) continue;
    struct peer *peer = &engine->peers[rank];
    status = links ? open_links(engine, peer, &links[rank * WIRE_LINKS], WIRE_LINKS) : open_default_links(engine, peer);
    for (uint32_t i = 0; i < peer->link_count && !status; i++)
      debug(DEBUG_INFO, "connection", "rank %d by device %s of %s, address %d", rank, peer->links[i].device->name,
            peer->links[i].device->verbs->name, peer->links[i].gid_index);
  }
  if (!status) status = frames_fit_slots(engine);
  for (uint32_t i = 0; i < engine->device_count && !status; i++) status = create_cq(engine, &engine->devices[i]);
  name_providers(engine);
  return status;
}

void links_close(struct engine *engine) {
  for (uint32_t i = 0; i < engine->device_count; i++) device_close(&engine->devices[i]);
  free(engine->devices);
}
