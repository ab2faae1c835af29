"""The floor that every rank imports: the group, the collectives, the rendezvous and the devices."""
