/*
 * A device that misbehaves on purpose, so that tests reach what an unreliable connection does only rarely.
 *
 * `inject` of the verbs table takes a comma-separated list, without spaces, of
 *
 *   drop=1/100       every SEND is lost with this chance
 *   drop_next=3      the next 3 SENDs are lost
 *   drop_after=10    the 10th SEND from now is lost, and it alone
 *   duplicate=1/100  every SEND is delivered twice with this chance, if the peer has a second receive posted
 *   seed=7           the generator behind the chances begins anew: the same seed and SENDs give the same faults
 *   none             ends all faults, those to its left too; the generator stays where it is
 *
 * What a list does not name stays as it was; what it names twice is as named last; 0 (0/1 for a chance) ends one
 * fault. Numbers are decimal and below 2^32; a chance is at most 1. A list with anything else changes nothing.
 *
 * Faults belong to the device context that sends, and count the SENDs of all its queue pairs. A lost SEND completes
 * successfully and takes no receive of the peer: nothing but the counters shows that it was meant to be lost. A SEND
 * that fails locally is not counted.
 */
#ifndef MLXDIST_SOFT_FAULTS_H
#define MLXDIST_SOFT_FAULTS_H

#include <stdbool.h>
#include <stdint.h>

struct soft_chance {
  uint32_t times;
  uint32_t of; /* never 0 where times is not */
};

struct soft_faults {
  bool any; /* all that the way of a message without faults looks at */
  struct soft_chance drop;
  struct soft_chance duplicate;
  uint32_t drop_next;
  uint32_t drop_after;
  uint64_t generator;
};

enum soft_fault { SOFT_FAULT_NONE, SOFT_FAULT_DROP, SOFT_FAULT_DUPLICATE };

/* 0, or EINVAL and no change. */
int soft_faults_set(struct soft_faults *faults, const char *list);

/* What happens to the next SEND. */
enum soft_fault soft_faults_next(struct soft_faults *faults);

#endif
