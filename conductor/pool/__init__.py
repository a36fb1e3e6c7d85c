"""The pool's control loop: replication, draining, roles and number of instances. Pure."""
