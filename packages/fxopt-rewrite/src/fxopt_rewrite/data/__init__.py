"""Values, graphs and ledgers as data, which JSON can hold."""
