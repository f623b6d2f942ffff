"""Values as data: one typed form for signatures, ledgers, archives and reproducers."""
