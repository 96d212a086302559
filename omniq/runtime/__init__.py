"""Running omniq's processes on one machine: broker, local systems, readiness."""
