"""Results of a compile as data: the report, layer tables and the precision audit."""
