"""Names that scripts for SageMaker's model parallel library import; the library itself is `smp`."""
