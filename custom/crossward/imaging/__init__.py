"""DICOM in, tensors out: reading, patient-disjoint splits, cohorts of sites, phantoms."""
