"""Names that scripts for SageMaker's model parallel library import; the library itself is `smp`."""

# Scripts compare it with "1.10" to learn which calls there are.
__version__ = "1.15.0"
