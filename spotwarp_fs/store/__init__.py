"""Object stores behind one small port."""
