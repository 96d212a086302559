"""omniq's HTTP front end: stateless, any number of replicas on one broker."""
