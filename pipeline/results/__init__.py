"""What a compile found, as data: the report, layer tables and the precision audit."""
