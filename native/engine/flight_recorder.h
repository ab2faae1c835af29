/*
 * The flight recorder: what this rank has done last, to be read when a job hangs or has failed.
 *
 * An operation is written down once, when it ends; those in progress are read from where they are, so none of them is
 * lost however many others come and go meanwhile. All under the engine's lock: a reader gets a consistent picture.
 */
#pragma once

#include "wire.h"

#include <stdint.h>

#define FLIGHT_ENTRIES 1000
#define FLIGHT_CALL_SITE_BYTES 48

struct operation;

struct flight_record {
  uint64_t number, sequence, started_ns, ended_ns;
  struct wire_descriptor descriptor;
  int32_t status, waits_for, to, from;
  uint16_t group;
  char call_site[FLIGHT_CALL_SITE_BYTES];
};

struct flight_recorder {
  struct flight_record records[FLIGHT_ENTRIES];
  uint32_t next, count; /* where the next one goes, and how many there are */
};

/* With the lock: `operation`, in progress until now, has ended. */
void flight_recorder_add(struct flight_recorder* recorder, const struct operation* operation, int status,
                         uint64_t now_ns);
